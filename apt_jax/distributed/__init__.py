"""One replica on several devices and hosts: rendezvous of the ranks, the program calls that rank 0 sends, and the
detection of lost ranks."""
