"""What every kvcast daemon and command shares: options, TLS, listeners, logging, readiness."""
