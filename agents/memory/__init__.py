"""Who holds memory on this host's devices, and how it is taken, loaded into and given back, one step at a time."""
