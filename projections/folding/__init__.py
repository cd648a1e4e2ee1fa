"""What each fact does to the site: one function a fact, listed in ``handlers.py``."""
