"""What other frameworks need to use ThunderEP. Each framework's own modules import it; nothing else does."""
