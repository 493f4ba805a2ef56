"""What `scripts/monitoring` makes: Grafana's board, from the table of metrics and one of panels."""
