"""Looking at jobs of this host from outside: ``torchestra top`` and ``torchestra report``."""
