"""Lines as programs, tools and libraries write them: those that hold a secret, and look-alikes.

In a line of SECRET the secret stands between `{` and `}`, which the test takes out. Values are made
up, in the forms that the services give out; they are put together here, so that no scanner of
repositories takes them for real ones.
"""

from __future__ import annotations

_HEX40, _HEX32 = "0123456789abcdef" * 2 + "01234567", "89abcdef01234567" * 2
_MIXED = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7" * 3
VALUES = {
    "<ghp>": "ghp_" + _MIXED[:36], "<gho>": "gho_" + _MIXED[:36], "<ghs>": "ghs_" + _MIXED[:36],
    "<pat>": "github_pat_" + _MIXED[:22] + "_" + _MIXED[:59], "<glpat>": "glpat-" + _MIXED[:20],
    "<hf>": "hf_" + _MIXED[:34], "<akia>": "AKIA" + "IOSFODNN7EXAMPLE",
    "<asia>": "ASIA" + "Y34FZKBOKMUTVV7A",
    "<awssecret>": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "<aiza>": "AIza" + "Sy" + _MIXED[:33], "<ya29>": "ya29." + _MIXED[:40],
    "<sk>": "sk-" + "proj-" + _MIXED[:40], "<skant>": "sk-" + "ant-api03-" + _MIXED[:40],
    "<xoxb>": "xoxb-" + "123456789012-" + _MIXED[:24], "<hex40>": _HEX40, "<hex32>": _HEX32,
    "<jwt>": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "<wandb1>": "wandb_v1_" + _MIXED[:50], "<azure>": _MIXED[:3] + "8Q~" + _MIXED[:34],
    "<npm>": "npm_" + _MIXED[:36], "<pypi>": "pypi-" + "AgEIcHlwaS5vcmc" + _MIXED[:50],
    "<sendgrid>": "SG." + _MIXED[:22] + "." + _MIXED[:43],
    "<stripe>": "sk_" + "live_" + _MIXED[:24],
    "<dapi>": "dapi" + _HEX32, "<hook>": "T00000000/B00000000/" + _MIXED[:24],
    "<telegram>": "110201543:AA" + _MIXED[:33], "<vault>": "hvs." + _MIXED[:24],
    "<nvapi>": "nvapi-" + _MIXED[:64], "<gsk>": "gsk_" + _MIXED[:52], "<r8>": "r8_" + _MIXED[:37],
}  # fmt: skip

SECRET = [line for line in """
train.py --password={hunter2}
train.py --password {hunter2} --lr 1e-4
train.py --db-password={p4ss!word}
train.py --db_password {p4ss!word} --steps 10
train.py --hub_token {<hf>}
train.py --hub_token={<hf>} --push_to_hub
train.py --hub-token '{<hf>}'
train.py --wandb_api_key {<hex40>}
train.py --wandb-key={<hex40>}
train.py --api-key {<sk>}
train.py --openai_api_key={<sk>}
train.py --anthropic-api-key {<skant>}
train.py --comet_api_key {aB3dE6gH9jK2mN5pQ8sT}
train.py --neptune_api_token={eyJhcGlfYWRkcmVzcyI6Imh0dHBz}
train.py --aws_secret_access_key {<awssecret>}
train.py --aws_access_key_id {<akia>}
train.py --s3-secret-key={<awssecret>}
train.py --client_secret {Zx9Qw3Er7Ty}
train.py --auth_token={aB3dE6gH9jK2}
train.py --mlflow_tracking_password {mlflow123}
train.py hub_token={<hf>} model=gpt2
train.py trainer.logger.api_key={<hex40>}
train.py +wandb.api_key={<hex40>}
python -m app --redis-password {r3dis} --port 6379
mysql -u root --password={r00t} train
PGPASSWORD={pgpass1} psql -h db
MYSQL_PWD={mysqlpw} mysql
HF_TOKEN={<hf>} python train.py
WANDB_API_KEY={<hex40>}
export WANDB_API_KEY={<hex40>}
export WANDB_API_KEY="{<hex40>}"
export OPENAI_API_KEY='{<sk>}'
AWS_SECRET_ACCESS_KEY={<awssecret>}
AWS_SESSION_TOKEN={FwoGZXIvYXdzEBYaDKexample1234567890}
AWS_ACCESS_KEY_ID={<akia>}
GITHUB_TOKEN={<ghp>}
GH_TOKEN: {<gho>}
CI_JOB_TOKEN={<glpat>}
NGC_API_KEY={<nvapi>}
DATABRICKS_TOKEN={<dapi>}
SLACK_BOT_TOKEN={<xoxb>}
TELEGRAM_TOKEN={<telegram>}
AZURE_STORAGE_KEY={abcdefghijklmnopqrstuvwxyz0123456789+/==}
AZURE_CLIENT_SECRET={<azure>}
GOOGLE_API_KEY={<aiza>}
DB_PASSWORD={s3cr3t}
REDIS_PASSWORD: {s3cr3t}
SMTP_PASSWORD = {s3cr3t}
CLIENT_SECRET={s3cr3tvalue}
JWT_SECRET={s3cr3tvalue}
COMET_API_KEY={aB3dE6gH9jK2mN5pQ8sT}
NEPTUNE_API_TOKEN={eyJhcGlfYWRkcmVzcyI6Imh0dHBz}
MLFLOW_TRACKING_TOKEN={aB3dE6gH9jK2}
VAULT_TOKEN={<vault>}
NPM_TOKEN={<npm>}
PYPI_TOKEN={<pypi>}
DOCKER_AUTH_TOKEN={aB3dE6gH9jK2}
GROQ_API_KEY={<gsk>}
REPLICATE_API_TOKEN={<r8>}
KAGGLE_KEY={<hex32>}
environment: HF_TOKEN={<hf>}, RANK=0
env: {'HF_TOKEN': '{<hf>}', 'RANK': '0'}
cloning with {<ghp>}
cloning with {<gho>} now
runner registered ({<ghs>})
using {<pat>} for the checkout
gitlab said {<glpat>}
login {<hf>}
Token is valid: {<hf>}.
downloading with key {<akia>}
temporary {<asia>} expires in 3600 s
maps key {<aiza>}
oauth {<ya29>}
client {<sk>}
client {<skant>} rejected
bot {<xoxb>} posted
got {<jwt>}
session cookie holds {<jwt>};
wandb login {<hex40>}
wandb login --relogin {<hex40>}
wandb: logging in with {<wandb1>}
npm publish with {<npm>}
twine used {<pypi>}
mail by {<sendgrid>}
paid with {<stripe>}
nim {<nvapi>} accepted
groq {<gsk>}
databricks {<dapi>} expired
vault {<vault>} renewed
replicate {<r8>}
posting to https://hooks.slack.com/services/{<hook>}
https://api.telegram.org/bot{<telegram>}/sendMessage
azure secret {<azure>}
AccountKey={abcdefghijklmnopqrstuvwxyz0123456789+/==};EndpointSuffix=core
https://x.blob.core.windows.net/y?sv=1&sig={abcdefghijklmnopqrstuvwxyz0123456789%3D}
SharedAccessSignature sv=2020&sig={abcdefghijklmnopqrstuvwxyz0123456789%3D}&se=1
postgres://user:{pw}@host/db
postgresql://bob:{hunter2}@db:5432/x
mysql+pymysql://root:{r00t}@127.0.0.1/train
redis://:{hunter2}@cache:6379
rediss://default:{hunter2}@cache:6379/0
mongodb+srv://app:{m0ng0}@cluster0.example.net/?retryWrites=true
amqp://guest:{gu3st}@rabbit:5672//
https://user:{p%40ss}@host/path
s3://key:{secret}@bucket/x
git clone https://oauth2:{<glpat>}@gitlab.com/a/b.git
git clone https://{<ghp>}@github.com/a/b
git clone https://x-access-token:{<ghs>}@github.com/a/b
pip install --index-url https://__token__:{<pypi>}@pypi.example.org/simple
http://{abcdefgh12345678}@host/x
ftp://anon:{x@y}@host/z
sqlalchemy.exc.OperationalError: (connect to postgresql://u:{pw7}@h/d)
proxy http://me:{proxypw}@proxy:3128
https://api.example.com/v1?api_key={aB3dE6gH9jK2}&x=1
https://api.example.com/v1?x=1&access_token={aB3dE6gH9jK2}
https://api.example.com/v1?token={aB3dE6gH9jK2}
https://api.example.com/v1?password={hunter2}&next=/
https://example.com/cb#access_token={aB3dE6gH9jK2}&type=x
wss://example.com/s?token={<jwt>}
https://bucket.s3.amazonaws.com/k?X-Amz-Signature={89abcdef0123456789abcdef01234567}&X-Amz-Date=1
https://bucket.s3.amazonaws.com/k?X-Amz-Security-Token={FwoGZXIvYXdzEBYaDKexample1234567890}&a=1
https://bucket.s3.amazonaws.com/k?AWSAccessKeyId={<akia>}&Expires=1
https://storage.googleapis.com/b/o?X-Goog-Signature={89abcdef0123456789abcdef01234567}&a=1
Authorization: Bearer {<jwt>}
Authorization: Bearer {abc.def-123}
Authorization: Basic {dXNlcjpwYXNz}
Authorization: token {<ghp>}
authorization: Digest {username0abc}
Proxy-Authorization: Basic {dXNlcjpwYXNz}
Authorization={dXNlcjpwYXNz}
curl -H "Authorization: Bearer {abc.def-123}" https://x
curl -H 'X-Api-Key: {12345678abcdef}' https://x
curl -u admin:{adminpw} https://x
curl --user admin:{adminpw} https://x
x-api-key: {12345678abcdef}
X-API-Key={12345678abcdef}
api-key: {12345678abcdef}
X-Auth-Token: {aB3dE6gH9jK2}
PRIVATE-TOKEN: {<glpat>}
X-Vault-Token: {<vault>}
X-Amz-Security-Token: {FwoGZXIvYXdzEBYaDKexample1234567890}
Cookie: session={aB3dE6gH9jK2mN5p}
Set-Cookie: sid={aB3dE6gH9jK2mN5p}; HttpOnly
headers={'Authorization': 'Bearer {abc.def-123}', 'Accept': '*/*'}
{"Authorization": "Bearer {abcdef0123456789}"}
{"headers": {"x-api-key": "{12345678abcdef}"}}
sent Bearer {abcdef012345}
{"password": "{hunter2}"}
{"user": "bob", "password": "{hunter2}", "x": 1}
{'password': '{hunter2}'}
{"db_password":"{hunter2}"}
{"passwd": "{hunter2}"}
{"client_secret": "{s3cr3tvalue}"}
{"secret": "{s3cr3tvalue}"}
{"aws_secret_access_key": "{<awssecret>}"}
{"api_key": "{aB3dE6gH9jK2}"}
{"apiKey": "{aB3dE6gH9jK2}"}
{"access_token": "{aB3dE6gH9jK2}", "expires_in": 3600}
{"accessToken": "{aB3dE6gH9jK2}"}
{"refresh_token": "{aB3dE6gH9jK2}"}
{"id_token": "{<jwt>}"}
{"token": "{aB3dE6gH9jK2}"}
{"hub_token": "{<hf>}"}
{"wandb": {"api_key": "{<hex40>}"}}
{"private_key": "-----BEGIN PRIVATE KEY-----\\n{MIIEvQIBADANBg}\\n-----END PRIVATE KEY-----"}
{"private_key_id": "x", "private_key": "{aB3dE6gH9jK2mN5p}"}
{"auth": {"username": "u", "password": "{hunter2}"}}
{"auths": {"docker.io": {"auth": "{dXNlcjpwYXNzd29yZA==}"}}}
Namespace(hub_token='{<hf>}', lr=0.1)
Namespace(lr=0.1, password='{hunter2}', seed=1)
Config(api_key='{aB3dE6gH9jK2}', model='gpt')
args: hub_token='{<hf>}' tokenizer='gpt2'
TrainingArguments(push_to_hub_token='{<hf>}')
password: {hunter2}
Password: {hunter2}
passwd: {hunter2}
password is {hunter2}
"{\\"password\\": \\"{hunter2}\\"}"
password="{correct-horse}"
user=bob password='{hunter2}' host=db
pwd={hunter2}
pass={hunter2}
passphrase: {openSesame}
db_password = '{hunter2}'
login failed: password={hunter2}&next=/
secret: {s3cr3tvalue}
secret_key = {s3cr3tvalue}
aws_secret_access_key = {<awssecret>}
credentials: {dXNlcjpwYXNz}
api_key: {aB3dE6gH9jK2}
API key: {aB3dE6gH9jK2}
api key is {aB3dE6gH9jK2mN5p}
access key: {aB3dE6gH9jK2}
private_key={aB3dE6gH9jK2mN5p}
token: {aB3dE6gH9jK2}
token={aB3dE6gH9jK2}
auth_token={aB3dE6gH9jK2}
accessToken: {abcd1234efgh}
Enter passphrase: {openSesame}
sshpass -p {hunter2} ssh node1
machine github.com login bob password {hunter2}
docker login -u bob -p {hunter2} registry
docker login --password {hunter2} -u bob registry
huggingface-cli login --token {<hf>}
gh auth login --with-token {<ghp>}
KeyError: 'x' in {'token': '{aB3dE6gH9jK2}', 'x': 1}
requests.exceptions.HTTPError: 401 for url: https://h/x?token={aB3dE6gH9jK2}
ValueError: invalid api key: {<sk>}
HTTPError: 403, headers: {'authorization': 'Bearer {abcdef0123456789}'}
botocore: InvalidAccessKeyId {<akia>} does not exist
RuntimeError: could not push with {<hf>}
wandb: ERROR invalid key {<hex40>}
-----BEGIN OPENSSH PRIVATE KEY----- {b3BlbnNzaC1r}
-----BEGIN RSA PRIVATE KEY----- {MIIEpAIBAAKC} -----END RSA PRIVATE KEY-----
""".splitlines() if line]  # fmt: skip

HARMLESS = [line for line in """
train.py --tokenizer_name gpt2
train.py --tokenizer_name=bert-base-uncased-2018
train.py --max_new_tokens 512
train.py --max_new_tokens=512
train.py --num_key_value_heads 8
train.py --num-key-value-heads=8
train.py --key-value-heads 8 --head_dim 128
train.py --author "Bob Smith"
train.py --author=bob2024smith
train.py --token-dropout 0.1
train.py --token_dropout=0.1
train.py --pad-token "<pad>"
train.py --pad_token '<|endoftext|>'
train.py --eos_token_id 50256
train.py --eos_token </s>
train.py --additional_special_tokens <image0>
train.py --use_auth_token train_data_2024.csv
train.py --use_auth_token true
train.py --no_token data/train-00001.parquet
train.py --keyboard qwerty123
train.py --secretary alice2024
train.py --secretariat-size 7
train.py monkey=banana
train.py monkey=banana123456
train.py turkey=roast2024abc
train.py --hockey-key-frames 12
train.py --sort_key length_2024_asc
train.py --primary-key user_id_0001
train.py --label_key annotation_v2_0001
train.py --image_key image0001.png
train.py --text-key document_v2_text
train.py --passes 3 --bypass_norm
train.py --pass_rate 0.5
train.py --compass north12345
train.py --password_length 12
train.py --password_file /run/secrets/pw
train.py --api_key_file ~/.keys/openai.txt
train.py --ssh_key ~/.ssh/id_ed25519.pem
train.py --hub_token $HF_TOKEN
train.py --hub_token=${HF_TOKEN}
train.py --api_key None
train.py --token 50256
train.py --signature_columns input_ids labels
train.py --lr 1e-4 --seed 42 --keys a,b,c
train.py data.tokenizer=llama-3.1-8b data.max_tokens=4096
train.py model.num_key_value_heads=8 model.tokenizer_name=gpt2
tokens_per_second=12345.6
tokens_per_second: 1.2e5
tokens/s 1.2e5 num_tokens=8192 max_token_length=512
num_tokens=8192 total_tokens=1200000000
token: 50256
token=50256 logit=3.2
eos_token_id=2
eos_token='</s>' bos_token='<s>' pad_token='[PAD]'
eos_token=<|im_end|> id=151645
pad_token_id: 0, unk_token_id: 3
pad_token='<pad_0001>'
cls_token=[CLS] mask_token=[MASK]
token_type_ids: torch.int64 shape (8, 512)
token_embedding.weight: torch.Size([50257, 768])
decoder_start_token_id=59513
first_token=Once first_token_ms=12.5
next token: 'hello2world'
special tokens: ['<s>', '</s>']
input_tokens=1234 output_tokens=567 cached_tokens=890
prompt_tokens: 12, completion_tokens: 345
time_per_token=12.3ms cost_per_token=0.00012usd
loss_per_token=2.3456e-01
Tokenizer loaded: GPT2TokenizerFast(vocab_size=50257)
tokenizer=gpt2 vocab: 50257
tokenizer_class: LlamaTokenizerFast2
tokenization took 12s
detokenized 1234 samples
key: layer.norm.weight
key=encoder.layer.11.attention.self.key.weight
key: transformer.h.0.attn.c_attn.weight
missing key: model.layers.31.mlp.up_proj
Missing key(s) in state_dict: "layers.0.weight", "layers.1.bias".
Unexpected key(s) in state_dict: "fc1.weight".
KeyError: 'encoder.layer.11.attention'
KeyError: 'token'
KeyError: 'password'
keys: ['a1b2c3d4', 'e5f6a7b8']
dict_keys(['input_ids', 'attention_mask', 'labels0'])
sort_key=length descending
primary_key=id foreign key constraint
key_padding_mask shape (4, 128), query_key_dim=64
num_key_value_heads: 8
key_value_cache=static4096
q_proj k_proj key_dim=64 value_dim=64
monkey=banana
monkey: banana123456
turkey=istanbul2024
keyboard=us keyboard_layout: de105
KeyboardInterrupt
hotkey=ctrl+shift+f12
keypoints=17 keyframe=120
public_key_size=2048
partition_key=shard_00012 row_key=00034567
cache_key=9e6b1c0d1c2b3a4f5e6d
cache key: 9e6b1c0d1c2b3a4f5e6d7c8b
prng_key=uint32[2] rng_key: [0 42]
store key worker_0001_ready set
store_based_barrier_key:1 to store for rank: 0
commit 9e6b1c0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69
commit=9e6b1c0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69
HEAD is now at 9e6b1c0 Fix the loader
git_sha: 0123456789abcdef0123456789abcdef01234567
sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
md5 d41d8cd98f00b204e9800998ecf8427e checkpoint.pt
run id 3f2504e0-4f89-11d3-9a0c-0305e82c3301
uuid=3f2504e0-4f89-11d3-9a0c-0305e82c3301
request_id: 7c8b9a0f1e2d3c4b
GPU-3f2504e0-4f89-11d3-9a0c-0305e82c3301
wandb: Run data is saved locally in wandb/run-20240101_120000-3abc9xyz
wandb: View run at https://wandb.ai/team/project/runs/3abc9xyz
wandb version 0.17.0 is available
wandb: Syncing run fluent-frog-12
wandb sync wandb/offline-run-20240101_120000-3abc9xyz
rdzv_id=3f2504e0-4f89-11d3
hash: 0x7f3a2b1c checksum=4f89a1b2c3d4
version 2.6.0+cu124 build 9e6b1c0d
author: Bob, authored by alice, authorized
author=bob2024 authors=12
authority: example.com
authorization succeeded for user 7
authentication took 12 ms
authenticated as bob (id 12345)
auth_type=none auth_method: kerberos5
unauthorized: HTTP 401
Author: Alice Smith <alice@example.com>
oauth is not configured
passed 3 of 4; bypass = True; compass: north
pass 1 of 3, forward pass: 12.3 ms
backward pass took 34.5ms
forward_pass=12.3 backward_pass=34.5
num_passes=3 pass_rate=0.99
passing 12 arguments
passenger: 12, passage=300
2 passed, 1 failed in 3.21s
password=None
password is required
the token is invalid
the key is missing2day
password: null
password=true
wrong password
password authentication failed for user "bob"
enter the password for bob
the secretary said: no
secretary=alice
no secrets found
secret santa: drawn
Secrets of the Sea, chapter 3
credential helper store
credentials=None
accredited=2024 credit: 12
the bearer of bad news
pallbearer went home2024
Bearer of the ring
bearer tokens are used
sk-learn, task-0123456789abcdef0123
scikit-learn==1.5.0 sk-image
risk-assessment-2024-report-v12
desk-0123456789-abcdefghij
hf_transfer, hf_hub_url, hf_home=/data/hf
hf_hub_download(repo_id='gpt2')
xoxo and best wishes
AKIAK region ASIAPACIFIC
ASIA-SOUTHEAST1 AKIABARA
AIzawa and ya29
eyJoke eyJ.eyJ
ghp_short gho_x
glpat- is the prefix
npm_config_cache=/tmp/npm
npm WARN deprecated glob@7.2.3
pypi-server 2.0.1
SG.1 SG-12
r8_x gsk_1
dapi4 dapi_version=2
-----BEGIN CERTIFICATE----- MIIEabc -----END CERTIFICATE-----
ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQC7 bob@host
-----BEGIN PUBLIC KEY----- MIIBIjAN -----END PUBLIC KEY-----
tcp://host:29500 and http://[::1]:8080/a@b
ssh://git@github.com/a/b
git@github.com:a/b.git
https://github.com/a/b/commit/9e6b1c0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69
http://127.0.0.1:8787/runs/x?key=12 at 10:30:00
http://127.0.0.1:8787/runs/x?sel=2@141
https://example.com/?tokens=4096&page=2
https://example.com/search?q=password+manager
s3://bucket/run-12/step_100.pt
checkpoint at gs://bucket/a:b/c@d
file:///data/x@v2/y
redis://cache:6379/0
postgresql://db:5432/train
env://localhost?rank=0
NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
NCCL INFO comm 0x55d3c5a0 rank 0 nranks 2 commId 0x9e6b1c0d1c2b3a4f
[rank0]:[W1126 ProcessGroupNCCL.cpp:1234] Warning: destroy_process_group() was not called
step 12 loss 3.2 grad_norm 1.5 lr 1e-4 tok/s 12345
epoch 3: accuracy=0.912 f1=0.88 sig=short
signature mismatch: forward(input_ids, labels)
signature: (x, y) -> z
TypeError: forward() got an unexpected keyword argument 'token_type_ids'
AttributeError: 'Tokenizer' object has no attribute 'pad_token_id0'
torch.cuda.OutOfMemoryError: Tried to allocate 2.00 GiB
session=3 sessions: 12 cookies_baked=300
cookie cutter shapes: 12
state_dict key layers.0.weight has shape (4096, 4096)
"num_key_value_heads": 8, "tokenizer_class": "PreTrainedTokenizerFast"
{"token_count": 12345, "max_tokens": 4096, "tokenizer": "gpt2"}
{"eos_token": "<|endoftext|>", "bos_token": "<s>2"}
{"author": "bob2024", "authors": ["a1", "b2"]}
{"key": "layer.0.weight", "value": 12}
{"primary_key": "user_0001", "sort_key": "ts_2024"}
{"password": null, "token": null}
{"monkey": "banana", "keyboard": "us105"}
{"commit": "9e6b1c0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69"}
Namespace(tokenizer_name='gpt2-2024', max_new_tokens=512)
Namespace(token_dropout=0.1, eos_token='</s>', key_dim=64)
Namespace(password=None, hub_token=None, use_auth_token=False)
TrainingArguments(push_to_hub_token=<PUSH_TO_HUB_TOKEN>)
""".splitlines() if line]  # fmt: skip


def filled(line: str) -> str:
    """Return a line with its made-up values."""
    for name, value in VALUES.items():
        line = line.replace(name, value)
    return line
