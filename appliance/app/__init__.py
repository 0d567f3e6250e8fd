"""Where an appliance process is put together: a gateway, a worker, or both on one machine."""
