"""Programs to copy from: they use the package, and the wheel does not have them."""
