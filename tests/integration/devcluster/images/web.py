"""A tiny web server for probes: GET /NAME is 200 while the file NAME exists in the given folder, else 503.

`python web.py FOLDER PORT`; listens at the pod's own address only, as programs on these nodes must.
"""

import http.server
import os
import sys
from pathlib import Path

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[2])


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by what is there."""

    def do_GET(self) -> None:
        """Answer one request."""
        print(self.path, self.headers.get("X-Probe"), flush=True)
        self.send_response(200 if (FOLDER / self.path.lstrip("/")).exists() else 503)
        self.end_headers()


http.server.HTTPServer((os.environ["POD_IP"], PORT), Handler).serve_forever()
