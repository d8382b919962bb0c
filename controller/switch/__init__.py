"""The controller's way to the switch: the control loop, and the connection over P4Runtime."""
