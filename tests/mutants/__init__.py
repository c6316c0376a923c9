"""Mutants of the code that privacy rests on, and the tests that must notice them."""
