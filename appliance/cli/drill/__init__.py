"""A drill: cause a real collapse of acceptance, and check that the appliance falls back and recovers."""
