"""An identity provider's token endpoint: it gives whoever asks a token of his name."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def token_server(user: str, *, lives_s: int) -> Iterator[str]:
    """Serves, and yields the address."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            now_s = int(time.time())
            claims = {"sub": user, "iat": now_s, "exp": now_s + lives_s}
            token = f"{_part({'alg': 'none'})}.{_part(claims)}."
            given = {"access_token": token, "token_type": "bearer", "expires_in": lives_s}
            answer = json.dumps(given).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/token"
        finally:
            server.shutdown()
            thread.join()


def _part(claims: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
