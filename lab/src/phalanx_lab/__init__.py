"""Every strategy from bare collectives: one short file each, to read, to run, and to test against."""
