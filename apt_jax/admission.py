from apt_jax.engine.admission import TENANT_SHARE as TENANT_SHARE
from apt_jax.engine.admission import Admission as Admission
from apt_jax.engine.admission import Coming as Coming
from apt_jax.engine.admission import Outlook as Outlook
from apt_jax.engine.admission import Queue as Queue
