"""Views of this host's jobs from outside: ``torchestra top`` and ``torchestra report``."""
