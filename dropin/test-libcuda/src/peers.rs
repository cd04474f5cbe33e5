//! Memory of other devices and other processes: peer access, IPC handles, exported allocations.
//!
//! All test devices of a process share its address space, so peer access is a word. Another process asks for memory over
//! a socket that the owner listens on; an IPC handle and an exported descriptor both say which, and where to ask.

use std::ffi::c_void;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::OnceLock;
use std::time::Duration;

use beeline::gpu::Buffer;
use beeline::p2p::share;

use crate::device::context_index;
use crate::ffi::{Cu, Out, export, write};
use crate::state::{DeviceMemory, Driver, Kind, Physical, driver};

/// How long two processes wait for each other's words.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Exported allocations that a process keeps, since it cannot see when their descriptors are gone.
const EXPORTED_MAX: usize = 4096;
const POSIX_FD: i32 = 1;
const NAME_BYTES: usize = 40;

/// `CUipcMemHandle`; what an exported descriptor contains is the same.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Handle([u8; 64]);

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// An allocation, by its address.
    Address = 1,
    /// One that was exported, by its number.
    Exported = 2,
}

export! {
    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: i32, from: i32, to: i32) {
        let driver = driver()?;
        driver.device(from)?;
        driver.device(to)?;
        if from == to { return Err(Cu::INVALID_DEVICE); }
        let access = i32::from(!driver.settings.mig);
        value.set(match attribute {
            1 => 0,                                             // performance rank
            2 => access,                                        // access
            3 => i32::from(access == 1 && driver.settings.atomics), // native atomics
            4 => access,                                        // arrays
            _ => return Err(Cu::INVALID_VALUE),
        })
    }

    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: u32) {
        driver()?.guard()?;
        let driver = driver()?;
        let (own, peer) = (driver.current()?, context_index(peer)?);
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        if own == peer || driver.settings.mig { return Err(Cu::PEER_ACCESS_UNSUPPORTED); }
        match driver.objects().peers.insert((own, peer)) {
            true => Ok(()),
            false => Err(Cu::PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    fn cuIpcGetMemHandle(handle: Out<Handle>, ptr: u64) {
        let driver = driver()?;
        driver.current()?;
        let start = {
            let objects = driver.objects();
            let (memory, offset) = objects.device_memory(ptr, 0)?;
            // As the real driver: only what cuMemAlloc gave.
            if memory.kind != Kind::Plain { return Err(Cu::INVALID_VALUE); }
            ptr - offset
        };
        handle.set(Handle::new(listener()?, What::Address, start))
    }

    fn cuIpcOpenMemHandle_v2(ptr: Out<u64>, handle: Handle, flags: u32) {
        let driver = driver()?;
        let device = driver.current_unsafe()?;
        let (name, what, number) = handle.parse()?;
        // Nor does the real driver open a handle of the same process.
        if flags != 1 || what != What::Address || name == *listener()? {
            return Err(Cu::INVALID_VALUE);
        }
        let buffer = fetch(driver, device, &name, what, number)?;
        let start = buffer.ptr().as_u64();
        driver.objects().memory.insert(start, DeviceMemory { buffer, device, kind: Kind::Ipc });
        ptr.set(start)
    }

    fn cuIpcCloseMemHandle(ptr: u64) {
        let driver = driver()?;
        driver.current_unsafe()?;
        let mut objects = driver.objects();
        match objects.memory.get(&ptr).map(|memory| memory.kind) {
            Some(Kind::Ipc) => {
                let closed = objects.memory.remove(&ptr);
                drop(objects);
                drop(closed);
                Ok(())
            }
            _ => Err(Cu::INVALID_VALUE),
        }
    }

    fn cuMemExportToShareableHandle(place: *mut c_void, handle: u64, kind: i32, flags: u64) {
        driver()?.guard()?;
        let driver = driver()?;
        driver.current()?;
        if kind != POSIX_FD || flags != 0 { return Err(Cu::INVALID_VALUE); }
        let name = listener()?;
        {
            let mut objects = driver.objects();
            let found = objects.physical.get(&handle).ok_or(Cu::INVALID_VALUE)?.buffer.clone();
            if objects.exported.len() >= EXPORTED_MAX { return Err(Cu::OUT_OF_MEMORY); }
            objects.exported.insert(handle, found);
        }
        let said = Handle::new(name, What::Exported, handle);
        let fd = beeline_sys::mem::memfd("test-cuda-export", said.0.len() as u64);
        let mut file = std::fs::File::from(fd.map_err(|_| Cu::UNKNOWN)?);
        file.write_all(&said.0).map_err(|_| Cu::UNKNOWN)?;
        write(place, file.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: Out<u64>, fd: *mut c_void, kind: i32) {
        driver()?.guard()?;
        let driver = driver()?;
        let device = driver.current()?;
        let number = i32::try_from(fd.addr()).map_err(|_| Cu::INVALID_VALUE)?;
        if kind != POSIX_FD { return Err(Cu::INVALID_VALUE); }
        // SAFETY: the caller passes a descriptor that is open during the call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        let mut file = std::fs::File::from(borrowed.try_clone_to_owned().map_err(|_| Cu::INVALID_VALUE)?);
        let mut said = Handle([0; 64]);
        file.seek(SeekFrom::Start(0)).map_err(|_| Cu::INVALID_VALUE)?;
        file.read_exact(&mut said.0).map_err(|_| Cu::INVALID_VALUE)?;
        let (name, what, exported) = said.parse()?;
        if what != What::Exported { return Err(Cu::INVALID_VALUE); }
        let buffer = fetch(driver, device, &name, what, exported)?;
        let made = Physical { buffer, device, reserved: false, mapped: false, rdma: false };
        let number = driver.handle();
        driver.objects().physical.insert(number, made);
        handle.set(number)
    }
}

impl Handle {
    const MAGIC: [u8; 8] = *b"testcuda";

    fn new(name: &[u8; NAME_BYTES], what: What, number: u64) -> Self {
        let mut bytes = [0; 64];
        let parts = [&Self::MAGIC[..], &number.to_le_bytes(), &[what as u8], &name[..]];
        for (place, byte) in bytes.iter_mut().zip(parts.concat()) {
            *place = byte;
        }
        Self(bytes)
    }

    fn parse(&self) -> Result<([u8; NAME_BYTES], What, u64), Cu> {
        let parsed = || {
            let (magic, rest) = self.0.split_first_chunk::<8>()?;
            let (number, rest) = rest.split_first_chunk::<8>()?;
            let (what, rest) = rest.split_first()?;
            let what = match what {
                1 => What::Address,
                2 => What::Exported,
                _ => return None,
            };
            let name = rest.first_chunk::<NAME_BYTES>()?;
            (*magic == Self::MAGIC).then_some((*name, what, u64::from_le_bytes(*number)))
        };
        parsed().ok_or(Cu::INVALID_VALUE)
    }
}

/// The abstract name of this process's socket, which a thread answers from the first call on.
fn listener() -> Result<&'static [u8; NAME_BYTES], Cu> {
    static NAME: OnceLock<Option<[u8; NAME_BYTES]>> = OnceLock::new();
    let start = || {
        let mut name = [b'.'; NAME_BYTES];
        let random = RandomState::new().hash_one(std::process::id());
        let text = format!("test-cuda-{}-{random:x}", std::process::id());
        name.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
        let address = SocketAddr::from_abstract_name(name).ok()?;
        let listener = UnixListener::bind_addr(&address).ok()?;
        let answer = move || listener.incoming().flatten().for_each(|asker| give(&asker));
        std::thread::Builder::new().name("test-cuda-peers".to_owned()).spawn(answer).ok()?;
        Some(name)
    };
    NAME.get_or_init(start).as_ref().ok_or(Cu::UNKNOWN)
}

/// Sends the memory that another process asks for; one that asks for what is not there sees the end of the socket.
fn give(asker: &UnixStream) {
    let mut asked = [0; 9];
    let timed = asker.set_read_timeout(Some(TIMEOUT)).and(asker.set_write_timeout(Some(TIMEOUT)));
    if timed.is_err() || (&mut &*asker).read_exact(&mut asked).is_err() {
        return;
    }
    let [what, number @ ..] = asked;
    let number = u64::from_le_bytes(number);
    let Ok(driver) = driver() else { return };
    let found = match what {
        1 => driver.objects().memory.get(&number).map(|memory| memory.buffer.clone()),
        _ => driver.objects().exported.get(&number).cloned(),
    };
    if let Some(buffer) = found {
        // The asker says so if it could not be sent.
        let _ = share::send(asker, &buffer);
    }
}

/// Memory of the process that listens at `name`, mapped into this one.
fn fetch(
    driver: &Driver,
    device: usize,
    name: &[u8; NAME_BYTES],
    what: What,
    number: u64,
) -> Result<Buffer, Cu> {
    let address = SocketAddr::from_abstract_name(name).map_err(|_| Cu::INVALID_VALUE)?;
    let socket = UnixStream::connect_addr(&address).map_err(|_| Cu::INVALID_VALUE)?;
    socket.set_read_timeout(Some(TIMEOUT)).map_err(|_| Cu::UNKNOWN)?;
    let mut asked = vec![what as u8];
    asked.extend(number.to_le_bytes());
    (&mut &socket).write_all(&asked).map_err(|_| Cu::INVALID_VALUE)?;
    let gpu = &driver.devices.get(device).ok_or(Cu::INVALID_DEVICE)?.gpu;
    share::receive(&socket, gpu).map_err(|_| Cu::INVALID_VALUE)
}
