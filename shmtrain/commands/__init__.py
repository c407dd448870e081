"""What ``shmtrain`` does beside training, one file a command; each is loaded only when it is run."""
