"""What a controller sets and reads, whichever engine runs the program."""
