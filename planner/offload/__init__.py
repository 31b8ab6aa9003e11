"""Values that leave the device for a while: where they lie meanwhile, and the calls that move them."""
