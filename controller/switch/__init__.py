"""The controller's side of the switch: what it should hold, and how that gets there."""
