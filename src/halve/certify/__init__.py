"""What cannot change: certificates, with their assumptions."""
