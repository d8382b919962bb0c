"""The controller's way to the switch: `control_loop` says when, `connection` speaks P4Runtime.

What is written comes from `kvcast.controller.core.program` and `kvcast.controller.core.reconcile`.
"""
