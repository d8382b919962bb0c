"""The ports of the software switch: in process, UDP tunnel, AF_PACKET."""
