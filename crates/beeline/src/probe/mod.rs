//! Gathering facts about the machine: from sysfs and procfs, live or below a captured root.
//!
//! Nothing here judges, writes, or touches a device. What an unprivileged user cannot read becomes a
//! note. Facts that only drivers know are merged in by [`add_driver_facts`].

use std::path::{Path, PathBuf};

use beeline_core::facts::platform::{Setting, SettingFrom};
use beeline_core::facts::{Fact, Kind, Known, Machine, Origin, Source};

mod cuda;
mod driver;
mod failure;
mod nvml;
mod pci;
mod procfs;
mod sysfs;
mod tree;
mod verify;

pub use cuda::cuda_facts;
pub use driver::{DriverDistance, DriverFacts, DriverGpu, DriverPeer, add_driver_facts};
pub use failure::explained;
pub(crate) use failure::explained_here;

pub use verify::{
    BYTES_MAX, DEVICES_MAX, Fault, Path as ProbePath, VerifyOptions, devices, paths, serve, verify,
};

use tree::Tree;

/// What to look at.
#[derive(Clone, Debug)]
pub struct Options {
    /// Root of the file system: `/` for the running machine, else a captured tree.
    pub root: PathBuf,
    /// Environment of the process in question. The library does not read its own.
    pub environment: Vec<(String, String)>,
    /// Ask NVML and the CUDA driver too, without creating a context. Only for the running machine, and only
    /// where its files show an NVIDIA GPU.
    pub driver: bool,
    /// Read the kernel log too. Only for the running machine, and only where it is allowed.
    pub kernel_log: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { root: PathBuf::from("/"), environment: Vec::new(), driver: true, kernel_log: true }
    }
}

impl Options {
    fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }
}

/// Gathers everything that files tell. It never fails: what cannot be read is missing, with a note where
/// the reason is a lack of rights. The record is unified and ready for checks.
pub fn gather(options: &Options) -> Machine {
    let mut probe = Probe { machine: Machine::new(), tree: Tree::new(&options.root) };
    procfs::gather(&mut probe);
    pci::gather(&mut probe);
    sysfs::gather(&mut probe);
    if options.kernel_log {
        procfs::kernel_log(&mut probe, options.is_live());
    }
    probe.environment(&options.environment);
    if options.driver && options.is_live() && !probe.machine.gpus.is_empty() {
        probe.drivers();
    }
    probe.notes();
    probe.machine.unify();
    probe.machine
}

/// The record under construction, with where its facts come from.
struct Probe {
    machine: Machine,
    tree: Tree,
}

impl Probe {
    /// Records a place as a source of its own and returns the origin of its facts.
    fn source(&mut self, name: &str) -> Origin {
        let number = u16::try_from(self.machine.sources.len()).unwrap_or(u16::MAX);
        self.machine.sources.push(Source {
            kind: Kind::Live,
            name: name.to_owned(),
            lines: 0,
            truncated: false,
        });
        Origin { source: number, line: 0 }
    }

    /// Parses a file of a known kind, if it is there.
    fn file(&mut self, path: &str, kind: Kind) -> bool {
        let Some(bytes) = self.tree.read(path, tree::FILE_BYTES_MAX) else { return false };
        match beeline_core::facts::read_as(&mut self.machine, kind, path, &bytes) {
            Ok(()) => true,
            Err(error) => {
                self.note(format!("{path} is not understood: {error}"));
                false
            }
        }
    }

    fn note(&mut self, text: String) {
        let origin = Origin::default();
        if self.machine.notes.len() < 256 && !self.machine.notes.iter().any(|n| n.value == text) {
            self.machine.notes.push(Fact { value: text, origin });
        }
    }

    /// What was there and could not be read.
    fn notes(&mut self) {
        let denied = self.tree.denied();
        if let Some(first) = denied.first() {
            let text = match denied.len() {
                1 => format!("{first} is not readable for this user"),
                count => {
                    format!("{first} and {} other files are not readable for this user", count - 1)
                }
            };
            self.note(text);
        }
    }

    /// Asks NVML, then CUDA. NVML numbers all GPUs, CUDA only those that it shows this process.
    fn drivers(&mut self) {
        let nvml = match nvml::nvml_facts() {
            Ok(facts) => facts,
            Err(error) => {
                self.note(format!("NVML was not asked: {error}"));
                DriverFacts::default()
            }
        };
        if !nvml.gpus.is_empty() {
            add_driver_facts(&mut self.machine, &nvml);
        }
        match cuda_facts() {
            Ok(cuda) => add_driver_facts(&mut self.machine, &driver::reconcile(&nvml, cuda)),
            Err(error) => self.note(format!("the CUDA driver was not asked: {error}")),
        }
    }

    fn environment(&mut self, environment: &[(String, String)]) {
        if environment.is_empty() {
            return;
        }
        let origin = self.source("environment");
        for (name, value) in environment {
            if self.machine.platform.env.len() >= 4096 {
                break;
            }
            let setting = Setting { value: value.clone(), from: SettingFrom::Environment };
            let list = self.machine.platform.env.entry(name.clone()).or_default();
            list.push(Fact { value: setting, origin });
        }
    }

    /// Learns a text fact from a small file.
    fn text(&self, path: &str) -> Option<String> {
        self.tree.text(path)
    }

    fn learn_hypervisor(&mut self, name: &str, origin: Origin) {
        self.machine.platform.hypervisor.learn(name.to_owned(), origin);
    }
}
