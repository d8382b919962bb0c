"""The P4Runtime server: one device, served over gRPC to several controllers."""
