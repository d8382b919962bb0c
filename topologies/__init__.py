"""Networks as data, and the ways to run a whole kvcast pool on them."""
