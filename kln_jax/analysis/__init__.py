"""What finished runs show: tables and figures from their working directories."""
