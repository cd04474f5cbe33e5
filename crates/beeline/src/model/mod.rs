//! Models: safetensors files, single or sharded, into one device allocation.
//!
//! ```
//! use beeline::core::model::{Selection, write::HeaderBuilder, Dtype};
//! use beeline::config::{Config, SimConfig};
//! use beeline::gpu::Gpu;
//! use beeline::model::{LoadOptions, Model};
//! use beeline::storage::Engine;
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! let mut bytes = HeaderBuilder::new().tensor("embed", Dtype::Bf16, &[100, 3])?.build()?;
//! bytes.extend([7; 600]);
//! std::fs::write(&path, bytes)?;
//!
//! let gpu = Gpu::simulated(&SimConfig::default())?;
//! let engine = Engine::new(&gpu, Config::default());
//! let model = Model::open(&[&path])?;
//! let loaded = model.load(&engine, &[gpu], LoadOptions::default())?;
//! assert_eq!(loaded.tensor("embed").unwrap().shape, [100, 3].into());
//! assert_eq!(loaded.verify(None)?.mismatches.len(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod load;
mod verify;

pub use load::{LoadOptions, Loaded, Loading, Tensor};
pub use verify::{Mismatch, Verified};

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beeline_core::model::index::INDEX_LEN_MAX;
use beeline_core::model::{Header, Index, IndexError, Layout, SelectError, Selection};

use crate::error::{Error, Result};
use crate::folder_of;
use crate::storage::File;

/// One model: its files, opened, and what they hold.
#[derive(Debug)]
pub struct Model {
    files: Vec<Arc<File>>,
    headers: Vec<Header>,
    remarks: Vec<Remark>,
}

/// Something worth saying that is no error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// A stable name: `misaligned`, `stray-file`, `unlisted-tensors`, `total-size`.
    pub code: &'static str,
    /// Whether a person should look at it; else it is for information.
    pub warning: bool,
    /// What it is, with its values.
    pub text: String,
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.text, self.code)
    }
}

/// What an index file's name ends with.
const INDEX_SUFFIX: &str = ".index.json";
/// What a model file's name ends with.
const FILE_SUFFIX: &str = ".safetensors";

impl Model {
    /// Opens a model: safetensors files, an index (`*.index.json`) with its shards beside it, or a
    /// folder that holds either.
    ///
    /// # Errors
    /// `is_not_found`, `is_permission_denied`; `is_refused` with the format's code where a header or
    /// index is broken, a shard is missing or holds other tensors than the index says.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let mut model = Self { files: Vec::new(), headers: Vec::new(), remarks: Vec::new() };
        if paths.is_empty() {
            return Err(Error::refused("no model file was named"));
        }
        for path in paths {
            model.add(path.as_ref())?;
        }
        model.remark_alignment();
        Ok(model)
    }

    /// The files, in the order that layouts number them.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// What each file holds.
    pub fn headers(&self) -> &[Header] {
        &self.headers
    }

    /// What is worth saying about the model.
    pub fn remarks(&self) -> &[Remark] {
        &self.remarks
    }

    /// Where the selected tensors would go.
    ///
    /// # Errors
    /// `is_refused` where a pattern matches nothing, a tensor cannot be sliced as asked, or two files
    /// hold one name.
    pub fn layout(&self, selection: &Selection) -> Result<Layout> {
        let headers: Vec<&Header> = self.headers.iter().collect();
        let selected = selection.select(&headers).map_err(|error| self.not_selected(error))?;
        Layout::new(&selected).map_err(|error| {
            let code = error.code();
            Error::refused("cannot place tensors").because(error).coded(code)
        })
    }

    fn not_selected(&self, error: SelectError) -> Error {
        let code = error.code();
        let path = |file: u32| match self.files.get(file as usize) {
            Some(file) => file.path().display().to_string(),
            None => file.to_string(),
        };
        let text = match &error {
            // It knows files by number only.
            SelectError::DuplicateTensor { first, second, .. } => format!(
                "cannot select tensors of {} (file {first}) and {} (file {second})",
                path(*first),
                path(*second)
            ),
            _ => "cannot select tensors".to_owned(),
        };
        Error::refused(text).because(error).coded(code)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        // Resolved once: what a folder holds is a file, however the folder's links are tied.
        if path.is_dir() { self.add_named(&in_folder(path)?) } else { self.add_named(path) }
    }

    fn add_named(&mut self, path: &Path) -> Result<()> {
        if path.to_string_lossy().ends_with(INDEX_SUFFIX) {
            return self.add_index(path);
        }
        self.add_file(path)
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path)?;
        let header = read_header(&file)?;
        self.files.push(Arc::new(file));
        self.headers.push(header);
        Ok(())
    }

    fn add_index(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path)?;
        if file.size() > INDEX_LEN_MAX {
            return Err(broken_index(path, IndexError::TooLarge { len: file.size() }));
        }
        let json = file.read_to_vec(0, file.size())?;
        let index = Index::parse(&json).map_err(|error| broken_index(path, error))?;
        let folder = folder_of(path);
        let listing = list(folder)?;
        let findings = index
            .check_listing(listing.iter().map(String::as_str))
            .map_err(|error| broken_index(path, error))?;
        let first = self.files.len();
        for shard in index.shards() {
            self.add_file(&folder.join(&**shard))?;
        }
        let headers: Vec<&Header> = self.headers.get(first..).unwrap_or_default().iter().collect();
        let more = index.check(&headers).map_err(|error| broken_index(path, error))?;
        self.remarks.extend(findings.into_iter().chain(more).map(|finding| Remark {
            code: finding.code(),
            warning: true,
            text: finding.to_string(),
        }));
        Ok(())
    }

    fn remark_alignment(&mut self) {
        for (file, header) in self.files.iter().zip(&self.headers) {
            if let Some(misaligned) = header.misaligned() {
                self.remarks.push(Remark {
                    code: misaligned.code(),
                    warning: false,
                    text: format!("{}: {misaligned}", file.path().display()),
                });
            }
        }
    }
}

/// Reads and checks the header of an open safetensors file.
fn read_header(file: &File) -> Result<Header> {
    let broken = |error: beeline_core::model::HeaderError| {
        let code = error.code();
        Error::refused(format!("{} is not a sound safetensors file", file.path().display()))
            .because(error)
            .coded(code)
    };
    let mut prefix = [0; 8];
    let head = file.read_to_vec(0, file.size().min(8))?;
    let Some(place) = prefix.get_mut(..head.len()) else {
        return Err(Error::refused("internal: more bytes than were asked for"));
    };
    place.copy_from_slice(&head);
    // A file shorter than the prefix is refused here, whatever its bytes.
    let len = Header::len_from_prefix(&prefix, file.size()).map_err(broken)?;
    let json = file.read_to_vec(8, len)?;
    Header::parse(&json, file.size()).map_err(broken)
}

fn broken_index(path: &Path, error: IndexError) -> Error {
    let code = error.code();
    Error::refused(format!("cannot load a model by {}", path.display())).because(error).coded(code)
}

/// The model file of a folder: its index, or else its only safetensors file.
fn in_folder(folder: &Path) -> Result<PathBuf> {
    let names = list(folder)?;
    let with = |suffix: &str| -> Vec<&String> {
        let named = names.iter().filter(|name| name.ends_with(suffix));
        named.filter(|name| !folder.join(name).is_dir()).collect()
    };
    let indexes = with(&format!("{FILE_SUFFIX}{INDEX_SUFFIX}"));
    match (indexes.as_slice(), with(FILE_SUFFIX).as_slice()) {
        ([index], _) => Ok(folder.join(index)),
        ([], [file]) => Ok(folder.join(file)),
        ([], []) => Err(Error::refused(format!(
            "{} holds no safetensors file and no index",
            folder.display()
        ))
        .remedy("name the folder that holds *.safetensors files")),
        ([], files) => Err(Error::refused(format!(
            "{} holds {} safetensors files and no index that says how they belong together",
            folder.display(),
            files.len()
        ))
        .remedy("name the files to load one by one")),
        (indexes, _) => {
            Err(Error::refused(format!("{} holds {} indexes", folder.display(), indexes.len()))
                .remedy("name the index to load"))
        }
    }
}

/// The names in a folder, sorted; names that are not UTF-8 cannot stand in an index and are left out.
fn list(folder: &Path) -> Result<Vec<String>> {
    let fail = |error| Error::at("list", folder, error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        if let Ok(name) = entry.map_err(fail)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}
