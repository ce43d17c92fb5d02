"""Chats: read from files, encoded by a chat template with a mask of the tokens that train, packed into rows."""

from zero.trainer.data.chat.cache import check_chats as check_chats, open_chats as open_chats
