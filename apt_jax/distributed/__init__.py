"""One replica on several devices and hosts: how ranks meet, what rank 0 tells the others, and how a lost rank is noticed."""
