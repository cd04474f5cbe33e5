//! The NVIDIA management library, loaded at run time: what the driver knows of GPUs without a context.
//!
//! Only questions, no settings. A function that this version of the library lacks, or that a device does
//! not support, answers nothing rather than an error: facts are optional by nature.

mod table;

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use table::Table;

/// What a function answers; numbers of later versions are representable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Return(pub i32);

impl Return {
    /// The function did what was asked.
    pub const SUCCESS: Self = Self(0);
    /// The kernel module is not loaded.
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    /// Library and kernel module are of different versions.
    pub const LIB_RM_VERSION_MISMATCH: Self = Self(18);
}

impl fmt::Display for Return {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::DRIVER_NOT_LOADED => f.write_str("the driver is not loaded"),
            Self::LIB_RM_VERSION_MISMATCH => {
                f.write_str("library and kernel module are of different versions")
            }
            Self(number) => write!(f, "NVML error {number}"),
        }
    }
}

/// Why there is no NVML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The library cannot be loaded.
    Unloadable {
        /// Its name or path.
        library: String,
        /// What the loader says.
        text: String,
    },
    /// The library lacks a function that every version since 2017 has.
    SymbolMissing {
        /// Its name.
        symbol: &'static str,
    },
    /// The library does not start.
    Init(Return),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unloadable { library, text } => write!(f, "cannot load {library}: {text}"),
            Self::SymbolMissing { symbol } => write!(f, "the library has no {symbol}"),
            Self::Init(result) => write!(f, "nvmlInit failed: {result}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// What is at the other end of an NVLink (nvmlIntNvLinkDeviceType_t).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd(pub u32);

impl LinkEnd {
    /// A GPU.
    pub const GPU: Self = Self(0);
    /// An NVLink switch.
    pub const SWITCH: Self = Self(2);
}

/// Peer-to-peer status of a pair (nvmlGpuP2PStatus_t).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatus(pub u32);

/// What a peer-to-peer status is asked about (nvmlGpuP2PCapsIndex_t).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCapability(pub u32);

impl PeerCapability {
    /// Reading the peer's memory.
    pub const READ: Self = Self(0);
    /// Writing the peer's memory.
    pub const WRITE: Self = Self(1);
}

/// What two GPUs share on PCI (nvmlGpuTopologyLevel_t).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ancestor(pub u32);

/// BAR1 of a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar1 {
    /// Size of the window.
    pub total: u64,
    /// What is mapped.
    pub used: u64,
}

/// Generation and width of a PCI Express link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// Generation, from 1.
    pub generation: u32,
    /// Number of lanes.
    pub width: u32,
}

/// `nvmlDevice_t`: opaque, valid while the library is started.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct RawDevice(*mut std::ffi::c_void);

/// `nvmlPciInfo_t`, version 3.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawPci {
    bus_id_legacy: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [c_char; 32],
}

const _: () = assert!(size_of::<RawPci>() == 68);

impl RawPci {
    const EMPTY: Self = Self {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        device_id: 0,
        subsystem_id: 0,
        bus_id: [0; 32],
    };

    /// `domain:bus:device.0`; a GPU and a switch are function 0 of their device.
    fn address(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

/// `nvmlBAR1Memory_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawBar1 {
    total: u64,
    free: u64,
    used: u64,
}

/// The library, started; stopped with the last handle.
pub struct Nvml {
    table: Table,
}

impl Nvml {
    /// Loads `libnvidia-ml.so.1`, or the library at `path`, and starts it.
    ///
    /// # Errors
    /// One kind for each cause; see [`OpenError`].
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, OpenError> {
        let table = table::load(path)?;
        // SAFETY: takes nothing; may be called more than once, each balanced by a shutdown.
        let result = unsafe { (table.nvmlInit_v2)() };
        if result != Return::SUCCESS {
            return Err(OpenError::Init(result));
        }
        Ok(Arc::new(Self { table }))
    }

    /// Version of the driver, such as `580.95.05`.
    pub fn driver_version(&self) -> Option<String> {
        let get = self.table.nvmlSystemGetDriverVersion?;
        let mut text = [0_u8; 96];
        // SAFETY: the library writes at most 95 bytes with their zero into the 96 offered.
        let result = unsafe { get(text.as_mut_ptr().cast(), 95) };
        c_text(result, &text)
    }

    /// CUDA version of the driver, as `1000 * major + 10 * minor`.
    pub fn cuda_version(&self) -> Option<i32> {
        let get = self.table.nvmlSystemGetCudaDriverVersion_v2?;
        let mut version = 0;
        // SAFETY: `version` is a place for one int.
        let result = unsafe { get(&raw mut version) };
        (result == Return::SUCCESS).then_some(version)
    }

    /// The number of GPUs, whatever `CUDA_VISIBLE_DEVICES` says.
    pub fn device_count(&self) -> u32 {
        let mut count = 0;
        // SAFETY: `count` is a place for one unsigned int.
        let result = unsafe { (self.table.nvmlDeviceGetCount_v2)(&raw mut count) };
        if result == Return::SUCCESS { count } else { 0 }
    }

    /// The GPU with this number; `None` where the user may not see it or it is lost.
    pub fn device(self: &Arc<Self>, number: u32) -> Option<Device> {
        let mut raw = RawDevice(std::ptr::null_mut());
        // SAFETY: `raw` is a place for one handle.
        let result = unsafe { (self.table.nvmlDeviceGetHandleByIndex_v2)(number, &raw mut raw) };
        (result == Return::SUCCESS).then(|| Device { nvml: Arc::clone(self), raw })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: balances the start in `open`; devices hold the value, so no handle is left.
        let _ = unsafe { (self.table.nvmlShutdown)() };
    }
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nvml")
    }
}

/// One GPU.
pub struct Device {
    nvml: Arc<Nvml>,
    raw: RawDevice,
}

impl Device {
    /// PCI address, as `domain:bus:device.function`.
    pub fn pci_address(&self) -> Option<String> {
        let mut pci = RawPci::EMPTY;
        // SAFETY: a handle of this library, and a place for one structure of version 3.
        let result = unsafe { (self.nvml.table.nvmlDeviceGetPciInfo_v3)(self.raw, &raw mut pci) };
        (result == Return::SUCCESS).then(|| pci.address())
    }

    /// Product name.
    pub fn name(&self) -> Option<String> {
        let get = self.nvml.table.nvmlDeviceGetName?;
        let mut text = [0_u8; 97];
        // SAFETY: a handle of this library; it writes at most 96 bytes with their zero into the 97.
        let result = unsafe { get(self.raw, text.as_mut_ptr().cast(), 96) };
        c_text(result, &text)
    }

    /// BAR1.
    pub fn bar1(&self) -> Option<Bar1> {
        let get = self.nvml.table.nvmlDeviceGetBAR1MemoryInfo?;
        let mut raw = RawBar1::default();
        // SAFETY: a handle of this library, and a place for one structure.
        let result = unsafe { get(self.raw, &raw mut raw) };
        (result == Return::SUCCESS).then_some(Bar1 { total: raw.total, used: raw.used })
    }

    /// Whether MIG mode is on now; `None` where the GPU has none.
    pub fn mig(&self) -> Option<bool> {
        let get = self.nvml.table.nvmlDeviceGetMigMode?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: a handle of this library, and places for two unsigned ints.
        let result = unsafe { get(self.raw, &raw mut current, &raw mut pending) };
        (result == Return::SUCCESS).then_some(current != 0)
    }

    /// Compute capability, major and minor.
    pub fn compute_capability(&self) -> Option<(i32, i32)> {
        let get = self.nvml.table.nvmlDeviceGetCudaComputeCapability?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: a handle of this library, and places for two ints.
        let result = unsafe { get(self.raw, &raw mut major, &raw mut minor) };
        (result == Return::SUCCESS).then_some((major, minor))
    }

    /// The link as it runs now, slower than it can where the GPU idles.
    pub fn pcie_link(&self) -> Option<PcieLink> {
        let table = &self.nvml.table;
        let generation = self.number(table.nvmlDeviceGetCurrPcieLinkGeneration)?;
        let width = self.number(table.nvmlDeviceGetCurrPcieLinkWidth)?;
        Some(PcieLink { generation, width })
    }

    /// The fastest link that GPU and slot can do together.
    pub fn pcie_link_max(&self) -> Option<PcieLink> {
        let table = &self.nvml.table;
        let generation = self.number(table.nvmlDeviceGetMaxPcieLinkGeneration)?;
        let width = self.number(table.nvmlDeviceGetMaxPcieLinkWidth)?;
        Some(PcieLink { generation, width })
    }

    /// Whether NVLink `link` is up; `None` where there is none of that number.
    pub fn nvlink_active(&self, link: u32) -> Option<bool> {
        let get = self.nvml.table.nvmlDeviceGetNvLinkState?;
        let mut active = 0;
        // SAFETY: a handle of this library, any number, and a place for one enum.
        let result = unsafe { get(self.raw, link, &raw mut active) };
        (result == Return::SUCCESS).then_some(active != 0)
    }

    /// The PCI address at the other end of `link`, where the driver tells.
    pub fn nvlink_remote(&self, link: u32) -> Option<String> {
        let get = self.nvml.table.nvmlDeviceGetNvLinkRemotePciInfo_v2?;
        let mut pci = RawPci::EMPTY;
        // SAFETY: a handle of this library, any number, and a place for one structure (version 2 of
        // this function takes version 3 of the structure).
        let result = unsafe { get(self.raw, link, &raw mut pci) };
        (result == Return::SUCCESS).then(|| pci.address())
    }

    /// What is at the other end of `link`.
    pub fn nvlink_remote_type(&self, link: u32) -> Option<LinkEnd> {
        let get = self.nvml.table.nvmlDeviceGetNvLinkRemoteDeviceType?;
        let mut kind = u32::MAX;
        // SAFETY: a handle of this library, any number, and a place for one enum.
        let result = unsafe { get(self.raw, link, &raw mut kind) };
        (result == Return::SUCCESS).then_some(LinkEnd(kind))
    }

    /// Whether this GPU can do that with the memory of `peer`.
    pub fn peer_status(&self, peer: &Self, capability: PeerCapability) -> Option<PeerStatus> {
        let get = self.nvml.table.nvmlDeviceGetP2PStatus?;
        let mut status = u32::MAX;
        // SAFETY: two handles of this library, any number, and a place for one enum.
        let result = unsafe { get(self.raw, peer.raw, capability.0, &raw mut status) };
        (result == Return::SUCCESS).then_some(PeerStatus(status))
    }

    /// What this GPU and `peer` share on PCI.
    pub fn common_ancestor(&self, peer: &Self) -> Option<Ancestor> {
        let get = self.nvml.table.nvmlDeviceGetTopologyCommonAncestor?;
        let mut level = u32::MAX;
        // SAFETY: two handles of this library, and a place for one enum.
        let result = unsafe { get(self.raw, peer.raw, &raw mut level) };
        (result == Return::SUCCESS).then_some(Ancestor(level))
    }

    fn number(
        &self,
        get: Option<unsafe extern "C" fn(RawDevice, *mut u32) -> Return>,
    ) -> Option<u32> {
        let get = get?;
        let mut value = 0;
        // SAFETY: a handle of this library, and a place for one unsigned int; every function passed
        // here has this signature.
        let result = unsafe { get(self.raw, &raw mut value) };
        (result == Return::SUCCESS).then_some(value)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nvml::Device({:?})", self.pci_address())
    }
}

fn c_text(result: Return, bytes: &[u8]) -> Option<String> {
    let text = CStr::from_bytes_until_nul(bytes).ok()?.to_str().ok()?;
    (result == Return::SUCCESS && !text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_one_that_is_another_are_errors_that_say_so() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("libnvidia-ml.so.1");
        let error = Nvml::open(Some(&missing)).unwrap_err();
        assert!(error.to_string().contains("libnvidia-ml.so.1"), "{error}");
        std::fs::write(&missing, "not a library").unwrap();
        let error = Nvml::open(Some(&missing)).unwrap_err();
        assert!(matches!(error, OpenError::Unloadable { .. }), "{error}");
        // A library that loads and is not NVML.
        match Nvml::open(Some(Path::new("libc.so.6"))) {
            Err(OpenError::SymbolMissing { symbol }) => assert_eq!(symbol, "nvmlInit_v2"),
            other => println!("SKIP glibc by that name ({other:?})"),
        }
    }

    #[test]
    fn addresses_and_texts_are_read_as_the_header_lays_them_out() {
        let pci = RawPci { domain: 1, bus: 0x3b, device: 0x1f, ..RawPci::EMPTY };
        assert_eq!(pci.address(), "0001:3b:1f.0");
        assert_eq!(std::mem::offset_of!(RawPci, domain), 16);
        assert_eq!(std::mem::offset_of!(RawPci, bus_id), 36);
        assert_eq!(c_text(Return::SUCCESS, b"580.95\0rest").as_deref(), Some("580.95"));
        assert_eq!(c_text(Return(3), b"580.95\0"), None);
        assert_eq!(c_text(Return::SUCCESS, b"endless"), None);
        assert_eq!(Return(777).to_string(), "NVML error 777");
    }
}
