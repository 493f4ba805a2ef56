"""One exchange with the service over all its attempts: batches, endpoints, retries."""
