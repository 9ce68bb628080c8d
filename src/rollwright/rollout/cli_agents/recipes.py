"""The recipes that come with this package. Versions are pinned, because a prompt of another version is another prompt."""

import json

from rollwright.gateway.settings import CallRule
from rollwright.rollout.cli_agents.recipe import SIDE_MODEL, CliRecipe, Packages

CLAUDE_CODE = CliRecipe(
    name="claude-code",
    packages=Packages("npm", ("@anthropic-ai/claude-code@2.1.326",)),
    command=("node_modules/.bin/claude", "-p", "--dangerously-skip-permissions", "--output-format", "text"),
    environment={
        "ANTHROPIC_BASE_URL": "$root_url",
        "ANTHROPIC_API_KEY": "$api_key",
        "ANTHROPIC_MODEL": "$model",
        "ANTHROPIC_SMALL_FAST_MODEL": "$side_model",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$side_model",
        # It refuses to run without questions as root unless it is told that nothing of value is there.
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        # The header is another one for every call, and it stands in front of the system prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    },
    strip=(r"x-anthropic-billing-header:[^\n]*\n?",),
)

CODEX = CliRecipe(
    name="codex",
    packages=Packages("npm", ("@openai/codex@0.169.0",)),
    command=(
        "node_modules/@openai/codex-*/vendor/*/bin/codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-",
    ),
    environment={"OPENAI_API_KEY": "$api_key"},
    files={
        ".codex/config.toml": 'model = "$model"\nmodel_provider = "rollwright"\n'
        "[model_providers.rollwright]\n"
        'name = "rollwright"\nbase_url = "$base_url"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    },
)

_OPENCODE_MODELS = {"$model": {"tool_call": True}, "$side_model": {"tool_call": True}}

OPENCODE = CliRecipe(
    name="opencode",
    packages=Packages("npm", ("opencode-ai@1.18.33",)),
    command=("node_modules/.bin/opencode", "run", "--model", "rollwright/$model"),
    environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    files={
        ".config/opencode/opencode.json": json.dumps(
            {
                "provider": {
                    "rollwright": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "$base_url", "apiKey": "$api_key"},
                        "models": _OPENCODE_MODELS,
                    }
                },
                "small_model": "rollwright/$side_model",
                "share": "disabled",
                "autoupdate": False,
                "permission": {"*": "allow"},
            }
        )
    },
    side_calls=(CallRule(model=SIDE_MODEL), CallRule(system="(?i)title generator")),
)

QWEN_CODE = CliRecipe(
    name="qwen-code",
    packages=Packages("npm", ("@qwen-code/qwen-code@0.24.4",), runtime="node"),
    command=(
        "node/bin/node",
        "$program_folder/node_modules/@qwen-code/qwen-code/cli.js",
        "--auth-type",
        "openai",
        "--yolo",
    ),
    environment={
        "OPENAI_BASE_URL": "$base_url",
        "OPENAI_API_KEY": "$api_key",
        "OPENAI_MODEL": "$model",
        "QWEN_CODE_NO_RELAUNCH": "1",
    },
    files={
        ".qwen/settings.json": json.dumps(
            {
                "telemetry": {"enabled": False},
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
                "fastModel": "$side_model",
            }
        )
    },
)

GEMINI_CLI = CliRecipe(
    name="gemini-cli",
    packages=Packages("npm", ("@google/gemini-cli@0.61.0",), runtime="node"),
    command=(
        "node/bin/node",
        "$program_folder/node_modules/@google/gemini-cli/bundle/gemini.js",
        "--yolo",
        "--model",
        "$model",
    ),
    environment={
        "GOOGLE_GEMINI_BASE_URL": "$root_url",
        "GEMINI_API_KEY": "$api_key",
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    },
    files={
        ".gemini/settings.json": json.dumps(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
            }
        )
    },
    # Its own checks ask models of the provider by their names.
    side_calls=(CallRule(model="gemini-*"),),
)

MINI_SWE_AGENT = CliRecipe(
    name="mini-swe-agent",
    packages=Packages("pip", ("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"), runtime="python"),
    command=(
        "python/bin/python3",
        "-m",
        "minisweagent.run.mini",
        "-c",
        "mini.yaml",
        "-c",
        "$home/mini.yaml",
        "-m",
        "openai/$model",
        "-y",
        "--exit-immediately",
        "-t",
    ),
    instruction="argument",
    environment={
        "OPENAI_API_BASE": "$base_url",
        "OPENAI_BASE_URL": "$base_url",
        "OPENAI_API_KEY": "$api_key",
        "PYTHONPATH": "$program_folder/site",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": "$program_folder/python/lib",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "$home/.config/mini-swe-agent",
    },
    files={
        # Its own variables are not those of the commands that it runs.
        "mini.yaml": "environment:\n  env: {LD_LIBRARY_PATH: '', PYTHONPATH: '', PYTHONDONTWRITEBYTECODE: ''}\n"
        "model:\n  cost_tracking: ignore_errors\n"
    },
)
