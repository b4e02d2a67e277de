"""The processor that is compiled for, and LLVM's passes over what is compiled."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import llvmlite.binding as llvm


class Target(NamedTuple):
    """A kind of processor.

    Attributes:
        machine: its architecture, as ``platform.machine()`` names it.
        triple, cpu, features: as LLVM has them.
    """

    machine: str
    triple: str
    cpu: str
    features: str

    @classmethod
    def host(cls) -> Target:
        """Return the processor of this process."""
        features = llvm.get_host_cpu_features().flatten()
        return cls(platform.machine(), llvm.get_process_triple(), llvm.get_host_cpu_name(), features)

    def has(self, feature: str) -> bool:
        """Return whether LLVM knows that it has a feature ("f16c")."""
        return f"+{feature}" in self.features.split(",")

    def machine_of_llvm(self) -> Any:
        """Return LLVM's code generator for it."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc="pic", codemodel="jitdefault", jit=True
        )

    def compile(self, text: str) -> bytes:
        """Return the object file of a module in LLVM's intermediate representation.

        Raises:
            RuntimeError: LLVM refuses it.
        """
        generator = self.machine_of_llvm()
        module = llvm.parse_assembly(text)
        module.triple = self.triple
        module.data_layout = str(generator.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        passes = llvm.create_pass_builder(generator, options)
        passes.getModulePassManager().run(module, passes)
        result: bytes = generator.emit_object(module)
        return result
