"""Torch's side of the state: what is registered, how it is read out exactly, and how it is put back."""
