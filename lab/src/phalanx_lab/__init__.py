"""A lecture on parallel training: every strategy built from collectives, in one short
file each."""
