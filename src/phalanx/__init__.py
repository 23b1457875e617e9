"""Train one transformer over any mix of devices: plan, check, verify, measure and draw it."""
