"""What dispatch and combine would take on a machine that need not be here: simulated, and checked against measured points."""
