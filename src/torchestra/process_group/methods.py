"""The collectives as methods of a group, made from their forms (forms.py), as is the stub methods.pyi."""

from torchestra.process_group.forms import FORMS
from torchestra.system.untraced import untraced


class CollectiveMethods:
    """The collectives in torch's C++ form, by all of torch's names; they run on ``communicator``."""


for _form in FORMS:
    _method = _form.method()
    for _name in (_form.name, *_form.aliases):
        setattr(CollectiveMethods, _name, _method)

untraced(CollectiveMethods)
