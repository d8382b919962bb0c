"""The packet loop: frames from ports to the program and back."""
