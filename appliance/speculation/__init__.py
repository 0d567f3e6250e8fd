"""The values and statistics that `appliance.monitor` decides by; no I/O."""
