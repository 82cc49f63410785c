from .control import GatewayState as GatewayState
from .control import RemoteGateway as RemoteGateway
from .limits import AttemptLimits as AttemptLimits
from .proxy import LLMProxy as LLMProxy
from .remote import FoundGateways as FoundGateways
from .remote import control_key_of as control_key_of
from .upstream import UpstreamModel as UpstreamModel
from .upstream_metrics import UpstreamStatus as UpstreamStatus
