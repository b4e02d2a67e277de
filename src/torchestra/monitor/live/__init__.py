"""What ``torchestra top`` shows: samples of a job, files of them, and the pages drawn of them."""
