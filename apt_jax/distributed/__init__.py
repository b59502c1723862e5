"""One replica on several hosts: rendezvous of the ranks, program calls sent by rank 0, and detection of lost ranks."""
