"""Serves NeMo-Gym's own example of a stateful resources server, as its package has it: `python FILE PORT`."""

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

config = StatefulCounterResourcesServerConfig(
    host="127.0.0.1", port=int(sys.argv[1]), entrypoint="", name="counter"
)
server = StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
