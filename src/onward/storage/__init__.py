"""Bytes in and out, without meaning."""
