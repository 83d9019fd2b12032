"""Makes the tests a package, so that worker processes import test functions by the same names as pytest."""
