"""The agent or the gateway asks for a model that its server does not have, or the model's folder is missing."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "wrong-model-name",
    Kind(
        pattern=r"model_not_found|has no model '|(?:invalid|unknown|no such) model|the model \S+ does not|serves '.* and not '"
        r"|(?:40[04]|NotFound|BadRequest).{0,120}?\bmodel\b.{0,80}?"
        r"(?:not found|does not exist|is not (?:a valid|available|found|supported))",
        cause="the server has no model of the name that was asked for",
        remedy="Give the name that the server lists under /v1/models: model= of the LLM resource, or litellm_params.model "
        "in LLMProxy(model_list=...). An agent should send llm.model, and no name of its own.",
    ),
    Kind(
        pattern=r"there is no folder .* to load a model from|is no model folder|Repo id must be|valid model identifier"
        r"|cannot load '",
        cause="the model cannot be loaded",
        remedy="Give the folder of a model (with config.json and its weights), or the name of one on a hub that this "
        "machine can reach.",
    ),
    explains=("upstream-refuses", "server-does-not-start"),
)
