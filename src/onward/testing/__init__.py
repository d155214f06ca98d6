"""For tests of stores and of Onward: faults to order, a recorder, a model of power cuts. No product code uses it."""
