"""Both ends: judged, and by the whole job."""
