"""What moves bytes between ranks: plans, the shared segment, how ranks meet, and who is alive."""
