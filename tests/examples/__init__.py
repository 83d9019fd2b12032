"""Programs that use Lightning and diffusers as the examples of their own do, on small random data."""
