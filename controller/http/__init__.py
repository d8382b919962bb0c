"""The controller's HTTP API: health, status, metrics, pins, and who may ask."""
