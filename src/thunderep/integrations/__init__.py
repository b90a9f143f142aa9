"""What other frameworks need to use ThunderEP; one module a framework, which imports it."""
